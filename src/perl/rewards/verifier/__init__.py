"""Whether an answer is the gold answer: plain things here, algebra in processes that may be killed."""

from perl.rewards.verifier.verdicts import TIMEOUT_SECONDS as TIMEOUT_SECONDS
from perl.rewards.verifier.verdicts import WORKERS as WORKERS
from perl.rewards.verifier.verdicts import Judging as Judging
from perl.rewards.verifier.verdicts import check as check
from perl.rewards.verifier.verdicts import check_all as check_all
from perl.rewards.verifier.verdicts import start_workers as start_workers
from perl.rewards.verifier.verdicts import unreadable as unreadable
from perl.rewards.verifier.version import verifier_version as verifier_version
