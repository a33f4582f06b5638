"""HTTP servers: uvicorn, bounds on requests, JSON errors."""
