"""Runs every example as its README says, and checks its output.

By day one example is started by torchrun, and two are shown to fail if they have not learned; by night all are."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorferry.cmake

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(folder: str, *arguments: str, timeout: float = 900) -> str:
    """Returns the example's output; fails with all of it if the exit code is not 0."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment["COLUMNS"] = "200"  # no line of the output is folded
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLES / folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{folder} ended with exit code {done.returncode}:\n{done.stdout}"
    return done.stdout


def started(alone: list[str], torchrun: list[str], **options: Any) -> pytest.MarkDecorator:
    """Runs the test with both ways to start an example. ``marks=pytest.mark.soak`` leaves torchrun to the night: other
    examples show that it starts the processes."""
    return pytest.mark.parametrize(
        "start", [pytest.param(alone, id="alone"), pytest.param([*TORCHRUN, *torchrun], id="torchrun", **options)]
    )


@started(["main.py"], ["2", "main.py"])
def test_hello_calls_and_raises_across_processes(start: list[str]) -> None:
    output = run("01-hello", *start)
    alice = re.search(r"I am alice, in process (\d+)", output)
    bob = re.search(r"Hello alice, this is bob in process (\d+)", output)
    assert alice and bob and alice[1] != bob[1], output
    assert "rpc_async: [84.0, 42.0, 21.0]" in output
    assert "ZeroDivisionError" in output and "division by zero" in output


@started(["main.py"], ["2", "main.py"], marks=pytest.mark.soak)
def test_tensors_arrive_as_values_and_views_send_their_elements(start: list[str]) -> None:
    output = run("02-tensors", *start)
    assert "[0.0, 1.0, 2.0, 3.0] came back as [0.0, 10.0, 20.0, 30.0]; mine is unchanged" in output
    assert "[1.0, 5.0, 9.0]" in output
    assert "32 tensors were in flight at once, the last one's norm is 310" in output
    assert "worker holds the mean of 4 tensors: [2.5, 2.5, 2.5]" in output
    assert len(re.findall(r"\d+ MB\D+[\d.]+ GB/s", output)) == 3


def accuracy(output: str) -> float:
    found = re.search(r"accuracy on 360 pictures never trained on: ([\d.]+)", output)
    assert found, output
    return float(found[1])


def test_parameter_server_learns_digits_with_three_trainers() -> None:
    output = run("03-parameter-server", "main.py")
    assert "a parameter server in 'server', 3 trainers" in output
    assert accuracy(output) > 0.9


@pytest.mark.soak
def test_parameter_server_learns_digits_under_torchrun() -> None:
    assert accuracy(run("03-parameter-server", *TORCHRUN, "4", "main.py")) > 0.9


@pytest.mark.gpu
def test_parameter_server_learns_digits_on_gpus() -> None:
    output = run("03-parameter-server", "main.py", "--device", "cuda")
    assert "on GPUs" in output
    assert accuracy(output) > 0.9


@pytest.mark.soak
def test_parameter_server_fails_when_it_has_not_learned() -> None:
    with pytest.raises(AssertionError, match=r"is not above 0\.9"):
        run("03-parameter-server", "main.py", "--epochs", "1", "--trainers", "1")


@started(["main.py", "--clients", "3"], ["4", "main.py"], marks=pytest.mark.soak)
def test_async_batching_gives_the_same_answers_with_fewer_passes(start: list[str]) -> None:
    output = run("04-async-batching", *start, "--requests", "40")
    assert "the answers are the same: True" in output
    rows = re.search(r"together\D+\d+\D+([\d.]+)", output)
    assert rows and float(rows[1]) > 1, output


def check_cpp_trainers(output: str, device: str) -> None:
    found = re.findall(rf"trainer (\d) on {device}: accuracy of the last 20 batches: ([\d.]+)", output)
    assert [rank for rank, _ in found] == ["0", "1"], output
    assert all(float(accuracy) > 0.8 for _, accuracy in found), output


def test_cpp_trainers_learn_with_a_parameter_server(prefix: Path) -> None:
    check_cpp_trainers(run("11-cpp-trainer", "main.py", "--prefix", str(prefix)), "cpu")


@pytest.mark.gpu
def test_cpp_trainers_learn_on_a_gpu(prefix: Path) -> None:
    check_cpp_trainers(run("11-cpp-trainer", "main.py", "--gpu", "--prefix", str(prefix)), "cuda:0")


def returns(output: str) -> tuple[float, float]:
    found = re.search(r"mean return: ([\d.]+) by chance, ([\d.]+) of \d+ episodes after", output)
    assert found, output
    return float(found[1]), float(found[2])


def test_actors_and_a_learner_learn_to_balance_poles(tmp_path: Path) -> None:
    plot = tmp_path / "returns.png"
    output = run("05-actor-learner", "main.py", "--quick", "--plot", str(plot))
    by_chance, after = returns(output)
    assert by_chance < 40 and after > 300
    assert output.count("from round") == 10
    assert plot.read_bytes().startswith(b"\x89PNG") or "matplotlib is not there" in output


@pytest.mark.soak
def test_actors_and_a_learner_learn_under_torchrun(tmp_path: Path) -> None:
    output = run("05-actor-learner", *TORCHRUN, "4", "main.py", "--quick", "--plot", str(tmp_path / "returns.png"))
    assert "2 actors" in output
    assert returns(output)[1] > 300


@pytest.mark.gpu
def test_actors_and_a_learner_learn_on_a_gpu(tmp_path: Path) -> None:
    output = run("05-actor-learner", "main.py", "--quick", "--device", "cuda", "--plot", str(tmp_path / "returns.png"))
    assert returns(output)[1] > 300


@pytest.mark.soak
def test_actors_and_a_learner_fail_when_they_have_not_learned(tmp_path: Path) -> None:
    arguments = ["--rounds", "2", "--actors", "1", "--plot", str(tmp_path / "returns.png")]
    with pytest.raises(AssertionError, match="is not above 300"):
        run("05-actor-learner", "main.py", *arguments)


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where TensorFerry's C++ side is installed."""
    found = tensorferry.cmake.prefix()
    if not (found / "CMakeCache.txt").exists():  # this package came with it
        return found
    folder = tmp_path_factory.mktemp("prefix")
    subprocess.run(["cmake", "--install", found, "--prefix", folder], check=True, stdout=subprocess.DEVNULL)
    return folder


def test_a_cpp_program_and_python_call_each_other(prefix: Path) -> None:
    output = run("06-embed-cpp", "main.py", "--prefix", str(prefix))
    assert "C++ called weigh() of Python: 3.0" in output
    assert "C++ was told of Python's exception: " in output
    assert "Python called mean() of C++: 2.5" in output
    assert "count_words(): {'be': 2, 'not': 1, 'or': 1, 'to': 2}" in output
    assert "Python was told of C++'s exception: the mean of no values" in output


def test_a_learner_learns_from_a_simulator_in_cpp(prefix: Path) -> None:
    output = run("07-simulator", "main.py", "--prefix", str(prefix))
    assert len(re.findall(r"generation \d: mean return +[\d.]+, best \d+, [\d,]+ steps/s", output)) == 6
    found = re.search(r"balances 1000 other poles for ([\d.]+) of 500 steps", output)
    assert found and float(found[1]) > 300, output


def test_a_learner_fails_when_it_has_not_learned(prefix: Path) -> None:
    arguments = ["--prefix", str(prefix), "--environments", "20", "--generations", "0"]
    with pytest.raises(AssertionError, match="is not above 300"):
        run("07-simulator", "main.py", *arguments)


def test_a_channel_a_reduction_and_a_converter_of_a_programs_own(prefix: Path) -> None:
    output = run("08-own-channel", "main.py", "--prefix", str(prefix))
    assert "the sum of 4 MiB of ones that went by spool: 1048576" in output
    assert "receiver: cpu -> cpu by spool" in output
    assert "  spool: usable" in output
    assert "the receiver has the tensor on privateuseone:1" in output
    assert "and returns it on privateuseone:1, with the sum 6" in output
    assert "Python loaded channel spool, reduction log_add_exp" in output
    assert "the sum is 1048576.0\na tensor goes by spool\n" in output
    assert "log(exp(0) + exp(0)) is tensor([0.6931, 0.6931])" in output


@started(["train.py"], ["4", "train.py"], marks=pytest.mark.soak)
def test_ddp_trains_as_with_gloo(start: list[str]) -> None:
    losses = {}
    for backend in "tensorferry", "gloo":
        output = run("09-ddp", *start, "--backend", backend, "--epochs", "3")
        assert accuracy(output) > 0.5
        losses[backend] = [float(each) for each in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses["gloo"]) == 3
    assert losses["tensorferry"] == pytest.approx(losses["gloo"], rel=1e-5)


def test_ddp_trains_with_gradients_that_travel_as_float16() -> None:
    assert accuracy(run("09-ddp", "train.py", "--hook", "half")) > 0.9


@started(["main.py"], ["4", "main.py"], marks=pytest.mark.soak)
def test_local_sgd_learns_digits_with_few_averages(start: list[str]) -> None:
    output = run("10-local-sgd", *start)
    assert "320 steps, parameters averaged 40 times" in output
    apart = re.search(r"before the last round: ([\d.]+)", output)
    assert apart and float(apart[1]) > 0, output
    assert accuracy(output) > 0.85


def test_local_sgd_fails_when_it_has_not_learned() -> None:
    with pytest.raises(AssertionError, match=r"above 0\.85"):
        run("10-local-sgd", "main.py", "--steps", "2")


@started(["main.py"], ["3", "main.py"], marks=pytest.mark.soak)
def test_trainers_learn_digits_from_gradients_that_a_server_averages(start: list[str]) -> None:
    output = run("14-gradient-server", *start)
    reached = re.findall(r"trainer \d: accuracy on 360 pictures never trained on: ([\d.]+)", output)
    assert len(reached) == 2 and len(set(reached)) == 1, output
    assert accuracy(output) > 0.85


@pytest.mark.soak
def test_trainers_of_a_gradient_server_fail_when_they_have_not_learned() -> None:
    with pytest.raises(AssertionError, match=r"not above 0\.85"):
        run("14-gradient-server", "main.py", "--steps", "2")


def test_samplers_read_the_weights_of_a_trainer_and_one_is_killed_and_joins_again() -> None:
    output = run("12-weights", "main.py")
    assert "killed sampler1" in output and "sampler1 is back" in output, output
    assert len(re.findall(r"sampler\d: \d+ samples, the last with version \d+", output)) == 3, output
    assert re.search(r"published \d+ versions of 8 MB", output), output


@pytest.mark.gpu
def test_samplers_on_a_gpu_copy_the_weights_there() -> None:
    output = run("12-weights", "main.py", "--gpu")
    assert len(re.findall(r"sampler\d: \d+ samples, the last with version \d+, gpu to gpu", output)) == 3, output


def test_prefill_writes_blocks_into_the_cache_of_decode() -> None:
    output = run("13-kv", "main.py")
    assert "prefill wrote 24 requests, mapped" in output, output
    assert re.search(r"decode read \d+ tokens of 24 requests from its cache of 8 MB", output), output


def test_trainers_without_torch_train_a_model_of_torch() -> None:
    output = run("15-without-torch", "main.py")
    assert len(re.findall(r"trainer\d: Python [\d.]+, numpy [\d.]+, without torch", output)) == 2, output
    assert output.count("ZeroDivisionError, ") == 2, output
    assert re.search(r"338 KB there and back: \d+ us", output), output
    assert "300 steps, accuracy" in output
