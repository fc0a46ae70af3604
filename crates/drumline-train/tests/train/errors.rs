//! What errors tell, and how often.

use std::{
    error::Error,
    fs,
    path::{Path, PathBuf},
};

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

/// The sources of a crate.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false => found.push(path),
        }
    }
}

/// The types of `text` that are errors and derive `Debug`.
fn derived(text: &str) -> Vec<String> {
    let by_hand = text.lines().filter_map(|line| line.split_once("Error for "));
    let by_hand = by_hand.map(|(_, rest)| rest.split(['<', ' ']).next().unwrap());
    let by_hand: Vec<&str> = by_hand.collect();
    let mut found = Vec::new();
    let mut derives = "";
    for line in text.lines() {
        let declares = ["struct ", "enum "].iter().find_map(|kind| line.split_once(kind));
        match declares.filter(|(before, _)| before.is_empty() || before.starts_with("pub")) {
            Some((_, rest)) => {
                let name = rest.split(|c: char| !c.is_alphanumeric()).next().unwrap();
                let is_error = derives.contains("thiserror::Error") || by_hand.contains(&name);
                if is_error && derives.contains("Debug") {
                    found.push(name.to_owned());
                }
                derives = "";
            }
            None if line.starts_with("#[derive(") => derives = line,
            None => {}
        }
    }
    found
}

/// `fn main() -> Result<()>` and `unwrap` print the `Debug` form of an error. So it is the text, with rank, advice
/// and page.
#[test]
fn no_error_derives_debug() {
    assert_eq!(
        derived("#[derive(Clone, Debug, thiserror::Error)]\n#[error(\"\")]\npub enum A {}"),
        ["A"]
    );
    assert_eq!(
        derived("#[derive(Debug)]\nstruct B<T>(T);\nimpl<T> std::error::Error for B<T> {}"),
        ["B"]
    );
    assert!(
        derived("#[derive(thiserror::Error)]\nenum C {}\n#[derive(Debug)]\nstruct D;").is_empty()
    );
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut files = Vec::new();
    for entry in fs::read_dir(crates).unwrap() {
        sources(&entry.unwrap().path().join("src"), &mut files);
    }
    let found: Vec<_> =
        files.iter().map(|path| (path, derived(&fs::read_to_string(path).unwrap()))).collect();
    assert!(found.len() > 500, "{}", found.len());
    let found: Vec<_> = found.into_iter().filter(|(_, found)| !found.is_empty()).collect();
    assert!(found.is_empty(), "{found:?}");
}
