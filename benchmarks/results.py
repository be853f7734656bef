"""Write RESULTS.md and its picture from the JSON of `tg bench`.

python -m benchmarks.results bench.json
"""

import json
import sys
from pathlib import Path

from threshold_gating.benchmarking import picture, report

HERE = Path(__file__).parent


def main(path):
    data = json.loads(Path(path).read_text())
    (HERE / "RESULTS.md").write_text(report(data) + "\n![Cost as the work grows](growth.svg)\n")
    picture(data, HERE / "growth.svg")


if __name__ == "__main__":
    main(sys.argv[1])
