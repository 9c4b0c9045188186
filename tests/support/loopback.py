"""HTTP calls to a server that the test started.

As httpx's own, but that no certificates are read for each call, which takes ten times as long as the call itself, and
that a server on a busy machine has minutes to answer, not five seconds.
"""

from __future__ import annotations

from functools import partial

import httpx

SECONDS = 240.0

get = partial(httpx.get, verify=False, trust_env=False, timeout=SECONDS)
post = partial(httpx.post, verify=False, trust_env=False, timeout=SECONDS)
delete = partial(httpx.delete, verify=False, trust_env=False, timeout=SECONDS)
request = partial(httpx.request, verify=False, trust_env=False, timeout=SECONDS)
stream = partial(httpx.stream, verify=False, trust_env=False, timeout=SECONDS)
