"""What pages/reproduction.md says, made from results/ and plans/ alone."""
