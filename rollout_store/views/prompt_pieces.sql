-- Internal: the pieces of every prompt. See `prompt_walk.sql`.
CREATE VIEW prompt_pieces AS
WITH RECURSIVE rows_of AS MATERIALIZED (SELECT * FROM lengths),
$walk
SELECT * FROM walk
