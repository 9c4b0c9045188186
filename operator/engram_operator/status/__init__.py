"""Status of a model from what was observed: pure functions of objects and the time.

Every message is for a person who was woken up: it carries the words of whoever knows (the scheduler, the kubelet, the
container's last lines), with what must not be in a status taken out.
"""

from engram_operator.status.model import (
    Observed,
    Refusal,
    StatusResult,
    ready_pods,
    same_status,
    status_of,
)
from engram_operator.status.pods import Trouble, diagnose
from engram_operator.status.redact import redact

__all__ = [
    "Observed",
    "Refusal",
    "StatusResult",
    "Trouble",
    "diagnose",
    "ready_pods",
    "redact",
    "same_status",
    "status_of",
]
