"""Controllers: each brings the objects of one kind to what they should be.

They stand between the cluster (kube), the engines and the pure parts (builders, status), and know no kopf. The wiring
above them decides which events lead to which key.
"""

from engram_operator.controllers.activator import ActivatorController, Held
from engram_operator.controllers.model import ModelController
from engram_operator.controllers.types import Clock, Controller, Enqueue, build_settings

__all__ = [
    "ActivatorController",
    "Clock",
    "Controller",
    "Enqueue",
    "Held",
    "ModelController",
    "build_settings",
]
