"""The viewer: runs and records as pages in a browser, read-only, and as one file to send to somebody."""
