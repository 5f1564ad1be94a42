"""Extends swarm. Task sources and advantages are in files of their own: what builds tasks must not import torch."""
