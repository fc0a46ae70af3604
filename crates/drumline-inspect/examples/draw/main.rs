//! Writes docs/schedules: every algorithm as a drawing and as text.
//!
//! ```text
//! cargo run -p drumline-inspect --example draw
//! ```

mod gallery;

use std::error::Error;
use std::fs;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = gallery::folder();
    fs::create_dir_all(&folder)?;
    for (name, content) in gallery::files()? {
        fs::write(folder.join(name), content)?;
    }
    println!("wrote {}", folder.canonicalize()?.display());
    Ok(())
}
