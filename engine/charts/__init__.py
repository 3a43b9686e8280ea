"""What a run recorded, as arrays, and charts of lines over steps."""
