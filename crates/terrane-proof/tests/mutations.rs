//! Every mutation in the library has a model that notices it (`docs/proof.md`).

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The text of all Rust files below `folder`, without lines that are comments.
fn code_below(folder: &Path) -> String {
    let mut code = String::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            code += &code_below(&path);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
                code += line;
                code.push('\n');
            }
        }
    }
    code
}

/// The names in `mutant!("name", ...)`.
fn mutations(code: &str) -> BTreeSet<&str> {
    code.split("mutant!(")
        .skip(1)
        .filter_map(|rest| rest.trim_start().strip_prefix('"')?.split('"').next())
        .collect()
}

#[test]
fn no_mutation_is_without_a_model() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let library = code_below(&here.join("../terrane/src"));
    let models = code_below(&here.join("src/protocols")) + &code_below(&here.join("src/calls"));
    let names = mutations(&library);
    assert!(names.len() > 50, "where are they?");
    let missing: Vec<_> = names.into_iter().filter(|name| !models.contains(&format!("\"{name}\""))).collect();
    assert!(missing.is_empty(), "no model tries these mutations: {missing:?}");
}

#[test]
fn mutations_are_found() {
    let code = "a(mutant!(\"one\", 1, mutant!(\n    \"two\", 2, 3)));";
    assert_eq!(mutations(code), BTreeSet::from(["one", "two"]));
}
