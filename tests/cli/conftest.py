"""Puts this folder on the path: the tests share cli_fakes.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
