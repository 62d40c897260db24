//! The documents of the demo: long enough to be worth fetching, and different from one another.

/// A handbook of about `sections * 40` tokens. `place` makes it a document of its own: two handbooks share
/// no prefix.
pub fn handbook(place: &str, sections: usize) -> String {
    let topics = [
        ("grain", "dry wooden bins", "every tenth day", "weevils"),
        ("apples", "slatted shelves", "every third day", "soft spots"),
        ("cheese", "cool stone cellars", "every morning", "cracks in the rind"),
        ("salt fish", "oak barrels", "once a month", "a sour smell"),
        ("honey", "glazed jars", "at the turn of the year", "foam under the lid"),
        ("dried peas", "linen sacks", "every fifth day", "damp corners"),
        ("lamp oil", "copper cans", "before each winter", "green stains"),
    ];
    let mut text = format!("The keeper's handbook of the {place} larder.\n\n");
    for section in 0..sections {
        let (what, place_kept, when, sign) = topics[section % topics.len()];
        let shelf = section * 3 + 2;
        text.push_str(&format!(
            "Section {}. Shelf {shelf} holds {what}, kept in {place_kept}. The keeper looks at it \
             {when} and writes down any {sign} in the book of the house.\n",
            section + 1
        ));
    }
    text
}

/// A question about a handbook, as a prompt's end.
pub fn question(handbook: &str, question: &str) -> String {
    format!("{handbook}\nQuestion: {question}\nAnswer:")
}
