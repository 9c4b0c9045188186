"""HTTP calls to a server that the test started.

As httpx's own, but that no certificates are read for each call, which takes ten times as long as the call itself.
"""

from __future__ import annotations

from functools import partial

import httpx

get = partial(httpx.get, verify=False, trust_env=False)
post = partial(httpx.post, verify=False, trust_env=False)
delete = partial(httpx.delete, verify=False, trust_env=False)
request = partial(httpx.request, verify=False, trust_env=False)
stream = partial(httpx.stream, verify=False, trust_env=False)
