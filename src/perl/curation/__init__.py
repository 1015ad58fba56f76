"""Makes entries of the zoo out of adapters, evaluates entries again, and finds adapters on the Hub.

run folder or Hub id -> Entry; Entry -> scores then and now; tag -> adapters
"""

from perl.curation.adding import add as add
from perl.curation.hub_search import Found as Found
from perl.curation.hub_search import hub_adapters as hub_adapters
from perl.curation.verification import Verification as Verification
from perl.curation.verification import verify as verify
