"""JSON Schemas of bodies: their validity, the bodies that fit, and their changes."""
