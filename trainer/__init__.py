"""Reward to advantage to segments to update to checkpoint: one scheduled cycle of the learner."""
