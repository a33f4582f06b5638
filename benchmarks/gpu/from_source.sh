#!/bin/sh
# Run a command with cotune importable from this source tree, without an installation: from_source.sh python3 -m ...
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
source=$root/build/source
rm -rf "$source"
mkdir -p "$source/cotune" "$source/cotune-0.1.0.dist-info"
for path in "$root"/core/*; do ln -s "$path" "$source/cotune/"; done
for layer in integrations adapters trainer; do ln -s "$root/$layer" "$source/cotune/"; done
printf 'Metadata-Version: 2.1\nName: cotune\nVersion: 0.1.0\n' > "$source/cotune-0.1.0.dist-info/METADATA"
PYTHONPATH="$source:$root${PYTHONPATH:+:$PYTHONPATH}" exec "$@"
