"""The command ``tensorferry``: what it lists, and how it tells the errors of its commands."""

from __future__ import annotations

import pytest
from tensorferry import __main__ as command


def test_an_address_that_cannot_be_served_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TENSORFERRY_KEY", "TENSORFERRY_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="1"):
        command.main(["doctor", "--serve", "192.0.2.1:29417"])
    said = capsys.readouterr().err
    assert said.startswith("tensorferry doctor: ") and "there is no cluster key" in said and said.count("\n") == 1


def test_the_command_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in command.COMMANDS)
    with pytest.raises(SystemExit, match="2"):
        command.main(["dctor"])
    assert "invalid choice: 'dctor'" in capsys.readouterr().err


def test_a_process_that_does_not_start_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TENSORFERRY_CHANNELS", "nonesuch")
    with pytest.raises(SystemExit, match="1"):
        command.main(["bench"])
    assert capsys.readouterr().err.startswith("tensorferry bench: tensorferry cannot be measured")
