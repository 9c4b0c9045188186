"""Custom resources, from YAML to typed values: the edge where everything invalid is refused.

The CRD files are the one source of truth. Offline they are applied as the API server applies them: unknown fields are
an error (a strict client's behaviour), defaults are filled in, the schema is checked, then the CEL rules, which are
restated in Python because the laptop has no CEL.
"""

from engram_operator.resources.documents import Resources, load_files, select_policy
from engram_operator.resources.model import EngramModel, ModelURI
from engram_operator.resources.policy import SnapshotPolicy, StoreURI
from engram_operator.resources.quantity import format_bytes, parse_quantity
from engram_operator.resources.schema import Schemas

__all__ = [
    "EngramModel",
    "ModelURI",
    "Resources",
    "Schemas",
    "SnapshotPolicy",
    "StoreURI",
    "format_bytes",
    "load_files",
    "parse_quantity",
    "select_policy",
]
