"""What proves the claims: oracle, load recorder, notebook runner, measurements. Nothing that computes imports it."""
