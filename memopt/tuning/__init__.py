"""Choosing keep, recompute or offload per layer class and tensor: the problem, its solver, its judge, its policy file."""
