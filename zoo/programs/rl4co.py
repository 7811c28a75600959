"""Attention learns to route by reinforcement: batches are TensorDicts, a second policy is the baseline."""

from collections.abc import Callable
from typing import Any

import torch
from rl4co.envs import TSPEnv
from rl4co.models import REINFORCE, AttentionModelPolicy
from rl4co.utils import RL4COTrainer

REQUIREMENTS = ("rl4co==0.7.0",)
NAMESPACE = "lightning.pytorch"
LOSS = "train/reward"  # the loss itself is noise around zero


def train(options: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Shorten tours through six cities; the policy is copied into the baseline after each epoch it wins."""
    env = TSPEnv(generator_params={"num_loc": 6})
    policy = AttentionModelPolicy(env_name=env.name, embed_dim=32, num_encoder_layers=1, num_heads=4)
    module = REINFORCE(
        env,
        policy,
        baseline="rollout",
        batch_size=16,
        train_data_size=160,
        val_data_size=32,
        test_data_size=32,
        optimizer_kwargs={"lr": 1e-3},
    )
    # The library's own default is FP16; None is Lightning's.
    RL4COTrainer(max_epochs=3, **{"precision": None, **options}).fit(module)
    return lambda: module.policy(env.reset(batch_size=[4]), env, decode_type="greedy")["reward"]
