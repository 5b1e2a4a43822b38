"""What makes notebooks a checked collection: execution, canonical form, pages. It knows claims, and no attention."""
