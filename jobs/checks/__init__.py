"""What lint and doctor share."""
