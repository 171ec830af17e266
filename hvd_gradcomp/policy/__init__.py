"""What is decided about an exchange: what it costs, and which one is best. Nothing is measured or sent here."""
