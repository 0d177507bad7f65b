"""Reinforcement learning: questions, answers, rewards, and a policy that learns from them."""
