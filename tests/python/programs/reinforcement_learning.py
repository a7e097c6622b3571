"""An agent owns the policy; observers own environments and ask the agent, by a reference, what to do."""

import math
import os
import random

import tensorferry.rpc as rpc
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

OBSERVERS = 2
NAMES = ["agent", *(f"observer{i}" for i in range(OBSERVERS))]
ITERATIONS = 6
LONGEST = 60


class Pole:
    """A pole on a point that is pushed to the left or to the right. It has fallen at 0.3 radians."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self):
        self.angle, self.speed = (self.random.uniform(-0.05, 0.05) for _ in range(2))
        return torch.tensor([self.angle, self.speed])

    def step(self, action):
        self.speed += 0.05 * (10 * math.sin(self.angle) + (4.0 if action else -4.0))
        self.angle += 0.05 * self.speed
        return torch.tensor([self.angle, self.speed]), 1.0, abs(self.angle) > 0.3


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id
        self.environment = Pole(self.id)

    def run_episode(self, agent):
        state = self.environment.reset()
        for _ in range(LONGEST):
            action = agent.rpc_sync().select_action(self.id, state)
            state, reward, done = self.environment.step(action)
            call(Agent.report_reward, agent, self.id, reward)
            if done:
                break


def local_call(method, rref, *args):
    return method(rref.local_value(), *args)


def call(method, rref, *args):
    return rpc.rpc_sync(rref.owner(), local_call, args=(method, rref, *args))


class Agent:
    def __init__(self):
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.me = rpc.RRef(self)
        ids = range(1, OBSERVERS + 1)
        self.observers = {i: rpc.remote(rpc.get_worker_info(NAMES[i]), Observer) for i in ids}
        self.dice = {i: torch.Generator().manual_seed(i) for i in ids}
        self.rewards, self.log_probs = {i: [] for i in ids}, {i: [] for i in ids}

    def select_action(self, observer, state):
        log_probs = self.policy(state).log_softmax(0)
        action = torch.multinomial(log_probs.detach().exp(), 1, generator=self.dice[observer])
        self.log_probs[observer].append(log_probs[action])
        return action.item()

    def report_reward(self, observer, reward):
        self.rewards[observer].append(reward)

    def run_episodes(self):
        futures = [
            rpc.rpc_async(observer.owner(), local_call, args=(Observer.run_episode, observer, self.me))
            for observer in self.observers.values()
        ]
        for future in futures:
            future.wait()

    def learn(self):
        """One step of REINFORCE; returns how long each observer's pole stood."""
        returns, log_probs = [], []
        for observer in self.observers:
            rest, to_go = 0.0, []
            for reward in reversed(self.rewards[observer]):
                rest = reward + 0.95 * rest
                to_go.append(rest)
            returns += reversed(to_go)
            log_probs += self.log_probs[observer]
        advantage = torch.tensor(returns)
        advantage = (advantage - advantage.mean()) / advantage.std()
        loss = -(torch.cat(log_probs) * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        lengths = [len(rewards) for rewards in self.rewards.values()]
        for observer in self.observers:
            self.rewards[observer].clear()
            self.log_probs[observer].clear()
        return loss.item(), lengths


def lead():
    agent = Agent()
    for number in range(1, ITERATIONS + 1):
        agent.run_episodes()
        loss, lengths = agent.learn()
        print(f"iteration {number}, loss {loss:.6f}, the poles stood for {lengths}")


def run(rank, world_size):
    torch.set_num_threads(1)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=world_size)
    if rank == 0:
        lead()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    spawn(run, args=(len(NAMES),), nprocs=len(NAMES))
