"""Token windows to calibrate with, and their digest."""
