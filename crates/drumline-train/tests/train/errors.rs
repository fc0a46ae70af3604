//! What errors tell, and how often.

use std::{error::Error, fs};

use drumline_group::{Config, init_process_group, store::FileStore};
use drumline_train::checkpoint::{Checkpoint, CheckpointDirectory};

/// The texts of an error and of its sources, the error first.
fn chain(error: &dyn Error) -> Vec<String> {
    let mut texts = vec![error.to_string()];
    let mut source = error.source();
    while let Some(error) = source {
        texts.push(error.to_string());
        source = error.source();
    }
    texts
}

/// A program that prints a chain of sources prints each fact once.
#[test]
fn no_error_says_again_what_its_source_says() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    fs::write(path.join("file"), b"no checkpoint").unwrap();
    let nobody = "tcp://127.0.0.1:9?rank=1&world_size=2";
    let at_once = Config::default().timeout(std::time::Duration::from_millis(50));
    let errors: [Box<dyn Error>; 6] = [
        Box::new(Checkpoint::read(&path.join("none")).unwrap_err()),
        Box::new(Checkpoint::read(&path.join("file")).unwrap_err()),
        Box::new(CheckpointDirectory::new(path.join("file/below")).newest().unwrap_err()),
        Box::new(FileStore::open(path, 2).unwrap_err()),
        Box::new(init_process_group(nobody, &at_once).unwrap_err()),
        Box::new(init_process_group("file:///", &Config::default()).unwrap_err()),
    ];
    for error in &errors {
        let texts = chain(&**error);
        for (index, text) in texts.iter().enumerate() {
            let again = texts[..index].iter().any(|outer| outer.contains(text));
            assert!(!again, "{texts:?}");
        }
        // The system's word is told once, too.
        let all = texts.join(": ");
        assert!(all.matches("(os error").count() <= 1, "{all}");
    }
}
