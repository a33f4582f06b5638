"""The viewer: shows runs and records as pages in a browser, read-only, or as one HTML file to send to somebody."""
