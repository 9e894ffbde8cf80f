-- The first schema, as it was laid out: never to be changed. A store of it must be upgraded by every later release.
CREATE TABLE ditto_events (
	id INTEGER NOT NULL, 
	at BIGINT NOT NULL, 
	kind TEXT NOT NULL, 
	step TEXT, 
	body TEXT, 
	PRIMARY KEY (id)
);
CREATE TABLE ditto_meta (
	name TEXT NOT NULL, 
	value TEXT NOT NULL, 
	PRIMARY KEY (name)
);
CREATE TABLE ditto_runs (
	id INTEGER NOT NULL, 
	run_id TEXT NOT NULL, 
	generation INTEGER NOT NULL, 
	kind TEXT NOT NULL, 
	workflow TEXT NOT NULL, 
	version TEXT NOT NULL, 
	input TEXT NOT NULL, 
	input_digest TEXT NOT NULL, 
	status TEXT NOT NULL, 
	owner TEXT, 
	fence INTEGER NOT NULL, 
	seq INTEGER NOT NULL, 
	iteration INTEGER NOT NULL, 
	state TEXT, 
	error TEXT, 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (run_id, generation)
);
CREATE INDEX ditto_runs_open ON ditto_runs (status) WHERE status != 'cancelled' AND status != 'completed' AND status != 'exhausted' AND status != 'failed';
CREATE TABLE ditto_values (
	id INTEGER NOT NULL, 
	digest BLOB NOT NULL, 
	body TEXT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (digest)
);
CREATE TABLE ditto_steps (
	id INTEGER NOT NULL, 
	run INTEGER NOT NULL, 
	path TEXT NOT NULL, 
	type TEXT NOT NULL, 
	version TEXT NOT NULL, 
	"after" TEXT NOT NULL, 
	effect TEXT, 
	state TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	"key" TEXT, 
	arguments TEXT, 
	output TEXT, 
	error TEXT, 
	admitted_at BIGINT, 
	settled_at BIGINT, 
	PRIMARY KEY (id), 
	UNIQUE (run, path), 
	FOREIGN KEY(run) REFERENCES ditto_runs (id)
);
INSERT INTO ditto_meta VALUES ('schema_version', '1');
INSERT INTO ditto_meta VALUES ('store_id', '01a22d46-0000-7000-8000-000000000001');
PRAGMA application_id=1145656404;
INSERT INTO ditto_runs VALUES (1, 'open', 1, 'graph', 'order', '1', '{"n":2}', '363379742f80b51bdb9206579af7754911543079b9399cb3fc315fb199f476e8', 'interrupted', NULL, 1, 3, 0, NULL, NULL, 1796058618000000, 1796058618000000);
INSERT INTO ditto_steps VALUES (1, 1, 'first', 'STEP', '1', '[]', 'idempotent', 'completed', 1, NULL, NULL, '4', NULL, NULL, 1796058618000000);
INSERT INTO ditto_events VALUES (4294967297, 1796058618000000, 'run_created', NULL, '{"workflow":"order","generation":1}');
INSERT INTO ditto_events VALUES (4294967298, 1796058618000000, 'step_completed', 'first', NULL);
INSERT INTO ditto_events VALUES (4294967299, 1796058618000000, 'run_interrupted', NULL, NULL);
