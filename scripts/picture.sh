#!/usr/bin/env bash
# Draws docs/architecture.svg from docs/architecture.dot, with colours for light and dark.
set -euo pipefail
cd "$(dirname "$0")/.."

style='<style>
text { fill: #1f2328; }
.edge path { stroke: #6e7781; } .edge polygon { stroke: #6e7781; fill: #6e7781; }
.edge text { fill: #57606a; }
.cluster path { fill: none; stroke: #8c959f; stroke-dasharray: 4 3; }
.node path { stroke: #8c959f; }
.program.node path { fill: #dbeafe; } .kernel.node path { fill: #e7e9ec; }
.engine.node path { fill: #dcf3e3; } .reclaim.node path { fill: #fde9d2; }
.shared.node path { fill: #ece2fb; } .outside.node path { fill: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .edge path { stroke: #8b949e; } .edge polygon { stroke: #8b949e; fill: #8b949e; }
  .edge text { fill: #a5afba; }
  .cluster path, .node path { stroke: #6e7681; }
  .program.node path { fill: #1d3557; } .kernel.node path { fill: #343a41; }
  .engine.node path { fill: #1c4030; } .reclaim.node path { fill: #573a17; }
  .shared.node path { fill: #3d2c5e; } .outside.node path { fill: #21262d; }
}
</style>'

# The comments name the version of dot that drew it: without them the picture changes when the source does.
dot -Tsvg docs/architecture.dot |
	sed -e '/^<!-- /d' -e '/^<!DOCTYPE/d' -e '/^ "http.*dtd">$/d' -e '/^ -->$/d' -e 's/ style="[^"]*"//' |
	awk -v style="$style" '{ print } !done && /viewBox/ { print style; done = 1 }' >docs/architecture.svg
