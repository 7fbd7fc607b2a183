"""The parts of `memopt compare`: what to run, running it, the rows, the table and the page."""
