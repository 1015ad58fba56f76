"""A Hub on this machine that huggingface_hub, peft, transformers and datasets talk to as to the real one."""

from tests.local_hub.faults import Faults
from tests.local_hub.server import CUT, LocalHub, Request
from tests.local_hub.store import Commit, Repository, StoredFile

__all__ = ["CUT", "Commit", "Faults", "LocalHub", "Repository", "Request", "StoredFile"]
