//! The store that tests use: a directory, or, if `FERRY_TEST_STORE=s3://BUCKET` is set, that bucket
//! with the keys and the endpoint of the environment. `scripts/test s3` sets it.

use ferry_env::Env;
use ferry_object::{DirStore, S3Location, S3Settings, S3Store, Store};
use std::sync::Arc;

/// The store of one test. Its objects are removed with it.
pub struct TestStore {
    pub env: Env,
    kind: Kind,
}

enum Kind {
    Directory(tempfile::TempDir),
    /// The URL of a prefix that nobody else uses.
    Bucket(String),
}

/// The name of the volume in the directory, or below the prefix.
const VOLUME: &str = "volume";

impl TestStore {
    pub fn new() -> Self {
        let env = Env::real();
        let kind = match std::env::var("FERRY_TEST_STORE") {
            Err(_) => {
                let directory = tempfile::tempdir().expect("a directory");
                std::fs::create_dir(directory.path().join(VOLUME)).expect("a directory");
                Kind::Directory(directory)
            }
            Ok(bucket) => Kind::Bucket(format!("{bucket}/{:016x}", env.entropy.next_u64())),
        };
        Self { env, kind }
    }

    /// The store, as another process may open it.
    pub fn store(&self) -> Arc<dyn Store> {
        open(&self.url(), &self.env)
    }

    /// What [`open`] takes.
    pub fn url(&self) -> String {
        match &self.kind {
            Kind::Directory(directory) => {
                directory.path().join(VOLUME).to_str().expect("it is text").to_owned()
            }
            Kind::Bucket(url) => format!("{url}/{VOLUME}"),
        }
    }

    /// The place of another volume beside this one, and how the directory or the bucket calls it.
    #[allow(dead_code, reason = "not all tests have clones")]
    pub fn beside(&self, name: &str) -> (String, Arc<dyn Store>) {
        if let Kind::Directory(directory) = &self.kind {
            std::fs::create_dir_all(directory.path().join(name)).expect("a directory");
        }
        let own = self.store().name().expect("it has a name");
        let parent = own.strip_suffix(VOLUME).expect("that is the last part of it");
        let name = format!("{parent}{name}");
        let store = self.store().beside(&name).expect("it is there");
        (name, store)
    }
}

impl Drop for TestStore {
    fn drop(&mut self) {
        if let Kind::Bucket(url) = &self.kind {
            let store = open(url, &self.env);
            for name in store.list("").unwrap_or_default() {
                store.delete(&name).ok();
            }
        }
    }
}

/// The store that another process made.
pub fn open(url: &str, env: &Env) -> Arc<dyn Store> {
    if !url.starts_with("s3://") {
        return Arc::new(DirStore::open(url.as_ref(), env.clone()).expect("it is there"));
    }
    let location: S3Location = url.parse().expect("it is a location");
    let settings = S3Settings::from_environment(None).expect("the environment has keys");
    Arc::new(S3Store::open(&location, &settings, env).expect("the settings are complete"))
}
