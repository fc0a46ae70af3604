//! One decoder under libFuzzer: the one that the variable `DECODER` names.

#![no_main]

use std::sync::OnceLock;

use drumline_fuzz::{DECODERS, Decoder, check};

fn decoder() -> &'static Decoder {
    static CHOSEN: OnceLock<&Decoder> = OnceLock::new();
    CHOSEN.get_or_init(|| {
        let name = std::env::var("DECODER").unwrap_or_default();
        let Some(chosen) = DECODERS.iter().find(|decoder| decoder.name == name) else {
            eprintln!("DECODER={name:?} is none of the decoders");
            std::process::exit(2);
        };
        chosen
    })
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    check(decoder(), bytes);
});
