"""The script the watch tests run: two or three ranks that wait in exchanges by name only.

Usage: watched.py CASE. Each rank reports a status of its own; no exchange is really made. Time runs four times as fast
for the watch.
"""

import sys
import time

from distributedtorch.elastic import watch
from distributedtorch.launch import join, place, record

CASE = sys.argv[1]

for name in ("BETWEEN_BEATS", "TO_SUSPECT", "TO_REPORT", "STALE"):
    setattr(watch, f"_SECONDS_{name}", getattr(watch, f"_SECONDS_{name}") / 4)


def load() -> None:
    print("loading", flush=True)
    time.sleep(4.5)


here = place.find()
join.join(here, device_type="cpu")
began = time.monotonic()
names = {"mismatch": ["gradients/0/3 #17", "state #1"], "late": ["gradients/0/3 #17", None, "gradients/0/3 #17"]}
names["same"] = ["gradients/0/3 #17", "gradients/0/3 #17"]
exchange = names[CASE][here.rank]
status = watch.Status(
    exchange=exchange, where=f"train.py:{30 + here.rank}", since=began if exchange else None, step=6, count=17
)
watch.start(here, join.client, lambda: status, fail=record.fail, say=record.say)
load()
