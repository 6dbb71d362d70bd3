"""eagle3lib: from a file of conversations to an EAGLE-3 draft that SGLang serves faster.

Flat modules, one noun each; docs/structure.md has a line for every one of them.
"""

import warnings

warnings.filterwarnings("ignore", message="IProgress not found")  # progress is plain text here, not a widget

__version__ = "0.1.0"
