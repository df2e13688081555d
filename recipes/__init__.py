"""What to quantize and how: recipes as data."""
