"""A page about TensorFerry's agents in torch's debug server (``torch.distributed.debug``, from torch 2.15 on).

Each worker server answers ``/handler/tensorferry`` with its process's metrics, as soon as the process has an agent.
:func:`page` shows those of all ranks.
"""

from __future__ import annotations

from typing import Any

from . import metrics

__all__ = ["HANDLER", "answer", "page"]

HANDLER = "tensorferry"

_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}TensorFerry{% endblock %}</h1>{% endblock %}
{% block content %}
  {% for i, (addr, resp) in enumerate(zip(addrs, resps)) %}
    <h2>Rank {{ i }}: {{ addr }}</h2>
    {% if resp.status_code != 200 %}<p>Failed to fetch: status={{ resp.status_code }}</p>{% endif %}
    <pre>{{ resp.text }}</pre>
  {% endfor %}
{% endblock %}
"""


def answer(request: Any, response: Any) -> None:
    """Answers a request to this process's worker server, on one of its threads."""
    from .agent import living

    parts = [f"{agent!r}\n{metrics.take(agent)}" for agent in living()]
    response.set_content("\n".join(parts) or "no agent\n", "text/plain")
    response.set_status(200)


class _Page:
    """The page, without its base, torch's DebugHandler, which needs packages that may not be installed."""

    fetch_timeout: float

    def __reduce__(self) -> tuple[Any, tuple[()]]:  # the server may be a process that is spawned
        return page, ()

    def routes(self) -> list[Any]:
        return [_frontend().Route("/tensorferry", self._handle)]

    def nav_links(self) -> list[Any]:
        return [_frontend().NavLink("/tensorferry", "TensorFerry")]

    def templates(self) -> dict[str, str]:
        return {"tensorferry.html": _TEMPLATE}

    def dump(self) -> str | None:
        addresses, answers = _frontend().fetch_all(HANDLER, timeout=self.fetch_timeout)
        return "\n".join(f"{address}\n{each.text}" for address, each in zip(addresses, answers, strict=True))

    def dump_filename(self) -> str:
        return "tensorferry"

    def _handle(self, request: Any) -> bytes:
        addresses, answers = _frontend().fetch_all(HANDLER, timeout=self.fetch_timeout)
        return bytes(request.frontend.render_template("tensorferry.html", addrs=addresses, resps=answers))


def _frontend() -> Any:
    from torch.distributed.debug import _frontend

    return _frontend


def page() -> Any:
    """Returns the page, for ``handlers=`` of ``torch.distributed.debug.start_debug_server``.

    Raises:
        ImportError: this torch has no debug server, or what it depends on is not installed (Jinja2, tabulate).

    Example::

        from torch.distributed.debug import start_debug_server
        from torch.distributed.debug._debug_handlers import default_handlers

        start_debug_server(handlers=[*default_handlers(), tensorferry.debug_page.page()])
    """
    return type("Page", (_Page, _frontend().DebugHandler), {})()
