package view

// PageSize is how many rows a page has at most.
const PageSize = 100

// Paging is where a page is among the others.
type Paging struct {
	// Page is the number of this one, from 1; First and Last are the numbers of its rows.
	Page, Pages, First, Last, Total int
	// Before and After are the pages beside it, 0 for none.
	Before, After int
}

// cut returns the rows of a page, or of the last one if there are not as many.
func cut[T any](rows []T, page int) ([]T, Paging) {
	p := Paging{Total: len(rows), Pages: max(1, (len(rows)+PageSize-1)/PageSize)}
	p.Page = min(max(1, page), p.Pages)
	from := (p.Page - 1) * PageSize
	to := min(from+PageSize, len(rows))
	p.First, p.Last = min(from+1, to), to
	if p.Page > 1 {
		p.Before = p.Page - 1
	}
	if p.Page < p.Pages {
		p.After = p.Page + 1
	}
	return rows[from:to], p
}
