"""What is deployed: the decoder P. Nothing here knows how its memory was learned."""
