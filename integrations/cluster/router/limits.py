"""Limits of the router. All times are in seconds."""

IN_FLIGHT = 64
"""Most requests that one engine works on at once; others wait in order."""
ATTEMPTS = 3
"""Most engines that one request is given to before it fails."""
FAULTS_IN_A_ROW = 5
"""Failed requests in a row after which an engine is restarted, even if it passes its health checks."""

START_SECONDS = 1200.0
"""Time limit for the start of an engine."""
REQUEST_SECONDS = 600.0
"""Time limit for one engine's work on one request; then another engine gets it."""
CONTROL_SECONDS = 600.0
"""Time limit for an engine to serve a new version, to retire one, to sleep or to wake."""
CLOSE_SECONDS = 60.0
"""Time limit for the end of a failed engine, before a new one is started in its place."""
HEALTH_EVERY = 10.0
"""Pause between two health checks of an engine."""

BACKOFF = 1.0
MAX_BACKOFF = 60.0
"""Pause before the first restart, and the longest pause. The pause doubles with each further restart."""
FORGIVE_AFTER = 3600.0
"""Healthy time after which the restarts of an engine are counted from 0 again."""
