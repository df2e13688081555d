"""What was measured, told on one page: gathered from a directory, drawn, and written as HTML, PNG and JSON."""
