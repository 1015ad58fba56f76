"""Makes entries of the zoo out of adapters, evaluates entries again, and finds adapters on the Hub.

run folder or Hub id -> Entry; Entry -> scores then and now; tag -> adapters
"""

from perl.hub.zoo_entries.adding import add as add
from perl.hub.zoo_entries.hub_search import Found as Found
from perl.hub.zoo_entries.hub_search import hub_adapters as hub_adapters
from perl.hub.zoo_entries.verification import Verification as Verification
from perl.hub.zoo_entries.verification import verify as verify
