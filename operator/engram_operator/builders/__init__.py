"""Custom resources to Kubernetes objects: pure functions, shared by the operator and the local mode.

Nothing here knows kopf, the kubernetes client, the clock or the machine: the same input gives the same objects, so the
operator can apply them again and again, and what a laptop runs is what a cluster gets.
"""

from engram_operator.builders.activator import activator
from engram_operator.builders.desired import desired
from engram_operator.builders.naming import model_hash, selector
from engram_operator.builders.settings import BuildSettings

__all__ = ["BuildSettings", "activator", "desired", "model_hash", "selector"]
