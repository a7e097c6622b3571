"""Reinforcement learning: actors balance poles, a learner learns from what they saw: python main.py"""

import argparse
import math
import os
import tempfile
import time
from typing import TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share this machine's cores

import tensorferry.rpc as rpc
import torch
from rich.console import Console
from rich.progress import track
from tensorferry import on_default_stream, wait_all
from torch import nn
from torch.multiprocessing.spawn import spawn

POLES, STEPS = 16, 32  # each actor balances so many poles at once, and makes so many steps a round
UPDATES, BATCH = 24, 128  # of the learner, a round
CAPACITY = 500_000  # steps that the replay buffer keeps
RATE = 1e-3  # of learning, at first
DISCOUNT, AHEAD = 0.99, 10  # a step's worth beside the one before; steps from one judged state to the next
LONGEST = 500  # steps of an episode: the greatest return
GOAL = 300

Weights: TypeAlias = list[torch.Tensor]


class CartPoles:
    """Carts on rails, each with a pole that must not fall (Barto, Sutton and Anderson 1983). A step's reward is 1.

    A state is the cart's position and speed and the pole's angle and angular speed, in metres, radians and seconds.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.dice = torch.Generator().manual_seed(seed)
        self.states = self._fresh(count)
        self.ages = torch.zeros(count)

    def _fresh(self, count: int) -> torch.Tensor:
        return torch.rand(count, 4, generator=self.dice) * 0.1 - 0.05

    def step(self, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pushes each cart. Returns the states that follow, which poles fell, and the lengths of the episodes that end.

        0 stands for an episode that goes on. One that ends is followed by another.
        """
        _, speed, angle, turning = self.states.unbind(1)
        sine, cosine = angle.sin(), angle.cos()
        push = (right * 20.0 - 10.0 + 0.05 * turning.square() * sine) / 1.1  # 10 N; masses 1.0 and 0.1 kg
        turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))  # half a pole is 0.5 m
        pull = push - 0.05 * turn * cosine / 1.1
        following = self.states + 0.02 * torch.stack([speed, pull, turning, turn], dim=1)
        fallen = (following[:, 0].abs() > 2.4) | (following[:, 2].abs() > math.radians(12))
        self.ages += 1
        ended = fallen | (self.ages >= LONGEST)
        lengths = self.ages * ended
        self.states = following.clone()
        self.states[ended] = self._fresh(int(ended.sum()))
        self.ages[ended] = 0
        return following, fallen, lengths


def look_ahead(
    following: torch.Tensor, fallen: torch.Tensor, ended: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What came of each step of a round: the state AHEAD steps later, or at the end of the episode or the round if that
    is earlier, the rewards until then, and the weight of that state's value, which is 0 where the pole fell.

    A reward is -1 for a fall and 0 for any other step: the same task as 1 for each step, with values near 0.
    """
    states, rewards, weights, going = following.clone(), -1.0 * fallen, DISCOUNT * ~fallen, ~ended
    for ahead in range(1, AHEAD):
        on = going[:-ahead]
        states[:-ahead] = torch.where(on[..., None], following[ahead:], states[:-ahead])
        rewards[:-ahead] -= DISCOUNT**ahead * (on & fallen[ahead:])
        weights[:-ahead] = torch.where(on, DISCOUNT ** (ahead + 1) * ~fallen[ahead:], weights[:-ahead])
        going[:-ahead] = on & ~ended[ahead:]
    return states, rewards, weights


def network() -> nn.Sequential:
    """What is to be expected of pushing to the left and to the right, in a state."""
    torch.manual_seed(1)
    first = nn.Linear(4, 128)
    first.weight.data /= torch.tensor([2.4, 2.0, 0.2, 2.0])  # the parts of a state have different units
    return nn.Sequential(first, nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def load(model: nn.Module, weights: Weights) -> None:
    for parameter, newest in zip(model.parameters(), weights):
        parameter.data.copy_(newest)


class Replay:
    """The last steps of all actors. Lives in a process of its own; everybody else holds a reference to it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps = torch.zeros(CAPACITY, 11, device=device)  # state, action, and what came of it (look_ahead)
        self.written = 0
        self.arrived: dict[int, torch.Tensor] = {}
        self.dice = torch.Generator().manual_seed(0)

    def add(self, actor: int, steps: torch.Tensor) -> None:
        with on_default_stream(self.device):
            self.arrived[actor] = steps.to(self.device, copy=True)

    def sample(self, count: int) -> torch.Tensor:
        """Random steps. What actors have added since the last time takes its place in their order, not in time's."""
        with on_default_stream(self.device):
            for _, steps in sorted(self.arrived.items()):
                places = torch.arange(self.written, self.written + len(steps), device=self.device) % CAPACITY
                self.steps[places] = steps
                self.written += len(steps)
            self.arrived.clear()
            chosen = torch.randint(min(self.written, CAPACITY), (count,), generator=self.dice)
            return self.steps[chosen.to(self.device)]


class Policy:
    """The newest weights. Lives with the learner; actors ask for them by a reference."""

    def __init__(self) -> None:
        self.published: Weights = []

    def publish(self, model: nn.Module) -> None:
        self.published = [parameter.detach().clone() for parameter in model.parameters()]

    def weights(self) -> Weights:
        return self.published


class Actor:
    """Balances poles, by the newest policy and now and then by chance, and tells the replay buffer what happened."""

    def __init__(self, index: int, policy: rpc.RRef[Policy], replay: rpc.RRef[Replay]) -> None:
        self.index, self.policy, self.replay = index, policy, replay
        self.model = network()
        self.poles = CartPoles(POLES, seed=index)
        self.dice = torch.Generator().manual_seed(1000 + index)

    @torch.no_grad()
    def act(self, chance: float) -> list[float]:
        """One round of steps; returns the lengths of the episodes that ended."""
        load(self.model, self.policy.rpc_sync().weights())
        steps = []
        for _ in range(STEPS):
            states = self.poles.states
            right = self.model(states).argmax(1)
            guess = torch.rand(POLES, generator=self.dice) < chance
            right = torch.where(guess, torch.randint(2, (POLES,), generator=self.dice), right)
            steps.append((states, right, *self.poles.step(right)))
        states, right, following, fallen, lengths = (torch.stack(each) for each in zip(*steps))
        later, rewards, weights = look_ahead(following, fallen, lengths > 0)
        rows = torch.cat([states, right[..., None], later, rewards[..., None], weights[..., None]], dim=2)
        self.replay.rpc_sync().add(self.index, rows.flatten(0, 1))
        return [float(length) for length in lengths[lengths > 0]]

    @torch.no_grad()
    def judge(self) -> list[float]:
        """The returns of episodes without chance."""
        load(self.model, self.policy.rpc_sync().weights())
        poles, first = CartPoles(POLES, seed=2000 + self.index), torch.zeros(POLES)
        while not bool(first.all()):
            _, _, lengths = poles.step(self.model(poles.states).argmax(1))
            first = torch.where(first == 0, lengths, first)
        return [float(length) for length in first]


class Learner:
    """Double deep Q-learning (van Hasselt, Guez and Silver 2016) from the replay buffer."""

    def __init__(self, rounds: int, device: torch.device) -> None:
        self.model, self.target = network().to(device), network().to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=RATE)
        self.rounds = rounds

    def slow_down(self, number: int) -> None:
        """Smaller steps towards the last round."""
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * (1 - number / self.rounds)

    def learn(self, steps: torch.Tensor) -> None:
        states, actions, later = steps[:, :4], steps[:, 4:5].long(), steps[:, 5:9]
        rewards, weights = steps[:, 9:10], steps[:, 10:11]
        with torch.no_grad():
            best = self.model(later).argmax(1, keepdim=True)
            wanted = rewards + weights * self.target(later).gather(1, best)
        expected = self.model(states).gather(1, actions)
        self.optimizer.zero_grad()
        nn.functional.smooth_l1_loss(expected, wanted).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        for slow, fast in zip(self.target.parameters(), self.model.parameters()):
            slow.data.lerp_(fast.data, 0.02)


def mean(calls: "list[torch.futures.Future[list[float]]]") -> float:
    """Of the returns that the actors answer; not a number where no episode ended."""
    lengths = [length for answer in wait_all(calls) for length in answer]
    return sum(lengths) / len(lengths) if lengths else math.nan


def drive(actors: int, rounds: int, plot: str, device: torch.device) -> None:
    """The learner's process: learns from the rounds before while the actors make the next one."""
    console, began = Console(), time.perf_counter()
    learner, policy = Learner(rounds, device), Policy()
    replay = rpc.remote("replay", Replay, args=(device,))
    mine = rpc.RRef(policy)
    team = [rpc.remote(f"actor{i}", Actor, args=(i, mine, replay)) for i in range(actors)]
    policy.publish(learner.model)
    console.print(f"{actors} actors, a learner, a replay buffer in {replay.owner_name()!r}; {rounds} rounds")
    before = mean([actor.rpc_async().act(1.0) for actor in team])  # by chance alone
    returns: list[float] = []
    for number in track(range(1, rounds + 1), "learning", console=console):
        sample = replay.remote().sample(UPDATES * BATCH)  # a reference: the steps stay where the buffer is
        batches = sample.to_here(device=device).split(BATCH)
        chance = max(0.1, 1 - 3 * number / rounds)
        acting = [actor.rpc_async().act(chance) for actor in team]
        learner.slow_down(number - 1)
        for batch in batches:
            learner.learn(batch)
        returns.append(mean(acting))
        policy.publish(learner.model)
    after = mean([actor.rpc_async().judge() for actor in team])
    show(console, returns, plot)
    steps = actors * POLES * STEPS * (rounds + 1)
    console.print(f"{steps} steps of carts, {rounds * UPDATES} of the learner in {time.perf_counter() - began:.1f} s")
    console.print(f"[bold]mean return: {before:.1f} by chance, {after:.1f} of {actors * POLES} episodes after[/bold]")
    if after <= GOAL:
        raise SystemExit(f"the mean return {after:.1f} is not above {GOAL}")


def show(console: Console, returns: list[float], plot: str) -> None:
    """The mean return of the episodes that ended in each round, as text and as a picture."""
    part = math.ceil(len(returns) / 10)
    for start in range(0, len(returns), part):
        values = [value for value in returns[start : start + part] if not math.isnan(value)]
        if values:
            average = sum(values) / len(values)
            console.print(f"from round {start + 1:3}: {average:6.1f} {'#' * round(average / 10)}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return console.print("no plot: matplotlib is not there")
    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot(xlabel="round", ylabel="mean return of the episodes that ended", title="CartPole")
    axes.plot(range(1, len(returns) + 1), returns, marker=".")
    figure.savefig(plot)
    console.print(f"plotted to {plot}")


def run(rank: int, world_size: int, rounds: int, plot: str, device: str, init_method: str = "env://") -> None:
    torch.set_num_threads(1)
    actors = world_size - 2
    if actors < 1:
        raise SystemExit(f"{world_size} processes: a learner, a replay buffer and at least one actor need 3")
    names = ["learner", "replay", *(f"actor{i}" for i in range(actors))]
    rpc.init_rpc(names[rank], rank=rank, world_size=world_size, init_method=init_method)
    if rank == 0:
        drive(actors, rounds, plot, torch.device(device))
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--actors", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--quick", action="store_true", help="50 rounds")
    parser.add_argument("--plot", default="returns.png", help="where to draw the returns")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the learner and the buffer are")
    options = parser.parse_args()
    rounds = 50 if options.quick else options.rounds
    if "RANK" in os.environ:  # torchrun has started us: a learner, a replay buffer, and the rest are actors
        return run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), rounds, options.plot, options.device)
    processes = options.actors + 2
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, rounds, options.plot, options.device, f"file://{folder}/store")
        spawn(run, args=arguments, nprocs=processes)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
