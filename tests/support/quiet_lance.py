"""Lance without the warning that it gives at each fork of a process that has loaded it: other tests fork,
too, and read no Lance table in their forks.
"""

from types import SimpleNamespace
from typing import Any

import lance

own: Any = lance
own.warnings = SimpleNamespace(warn=lambda *_, **__: None)
