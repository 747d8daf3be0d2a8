"""The page at `/`: static files for a browser, and the one module that serves them. No build step, no address but its own."""
