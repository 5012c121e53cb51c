# SPDX-License-Identifier: Apache-2.0
"""A part that reports one figure, and then hangs with a process beside it."""

import subprocess
import sys
import time
from pathlib import Path

from on_gpu.command import put

beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
put(Path(sys.argv[3]), part="hangs", step="figure", beside=beside.pid)
time.sleep(600)
