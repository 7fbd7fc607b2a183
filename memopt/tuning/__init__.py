"""Choosing keep, recompute or offload per layer class and tensor: problem, solver, judge, policy file."""
