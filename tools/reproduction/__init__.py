"""What docs/reproduction.md says, made from results/ and experiments/ alone."""
